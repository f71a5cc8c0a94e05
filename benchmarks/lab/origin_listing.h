/* Buckets whose keys are read from files at the start: their entries are rendered once, so that a page of a listing is
   a copy. Buckets of any length, whose keys are computed. They hold no bytes. */
#ifndef ORIGIN_LISTING_H
#define ORIGIN_LISTING_H

#include "origin.h"

/* Reads the keys of a bucket with the name of the file: a key per line, sorted by bytes; or makes the bucket "numbered" or
   "random", given as "numbered:COUNT", whose keys of 24 bytes are computed. 0 if it cannot be read. */
int listing_load(const char *path);
/* Whether `name`, of a bucket or of an object in it, belongs to such a bucket. */
int listing_is(const char *name);
/* Answers ListObjectsV2 and HEAD. */
int listing_respond(struct request *r, int is_bucket);

#endif
