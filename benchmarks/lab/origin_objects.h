/* Objects in memory and uploads in progress. No HTTP. All functions may be called by any thread. */
#ifndef ORIGIN_OBJECTS_H
#define ORIGIN_OBJECTS_H

#include <stdint.h>
#include <stdio.h>

/* What was written: `file` is a memfd, or -1 if only the size was kept. Released by the last of its users. */
struct blob {
    long size;
    int file;
    int users;
    /* Of Google Cloud Storage: CRC32C, if `is_summed`; metadata as JSON, or NULL, which the blob owns. */
    int is_summed;
    uint32_t crc32c;
    char *metadata;
};

/* Owned by the caller. */
struct blob *blob_new(long size, int file);
void blob_release(struct blob *blob);
/* Adds a part to the end of a whole; a part whose bytes were kept makes a whole whose bytes are kept. */
void blob_append(struct blob *whole, const struct blob *part);

/* Names are "bucket/key". `objects_get` returns a blob to release, or NULL; `objects_put` takes ownership. */
struct blob *objects_get(const char *name);
void objects_put(const char *name, struct blob *blob);
void objects_delete(const char *name);
/* Calls `each` with the key and size of all objects of a bucket whose key has the prefix, in
   order of keys. */
void objects_list(const char *bucket, const char *prefix, void (*each)(FILE *, const char *key, long size), FILE *out);

/* An upload's parts may come in any order; 0 if there is no such upload. */
long upload_begin(const char *name);
int upload_part(long id, long part, struct blob *blob);
/* Appends to an upload whose parts come in order; returns the bytes received so far, or -1. */
long upload_append(long id, struct blob *blob);
int upload_complete(long id);
int upload_abort(long id);

#endif
