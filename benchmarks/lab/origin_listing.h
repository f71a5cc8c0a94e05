/* Buckets whose keys are read from files at the start: their entries are rendered once, so that a page of a listing is
   a copy. They hold no bytes. */
#ifndef ORIGIN_LISTING_H
#define ORIGIN_LISTING_H

#include "origin.h"

/* Reads the keys of a bucket with the name of the file: a key per line, sorted by bytes. 0 if it cannot be read. */
int listing_load(const char *path);
/* Whether `name`, of a bucket or of an object in it, belongs to such a bucket. */
int listing_is(const char *name);
/* Answers ListObjectsV2 and HEAD. */
int listing_respond(struct request *r, int is_bucket);

#endif
