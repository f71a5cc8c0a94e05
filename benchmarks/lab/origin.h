/* A request of a connection, and how to receive its body and to answer it. origin.c implements this and answers S3;
   origin_gcs.c answers the JSON API of Google Cloud Storage. */
#ifndef ORIGIN_H
#define ORIGIN_H

#include "origin_objects.h"

enum { HEAD_BYTES = 32 << 10, NAME_BYTES = 2048 };

/* What requests are counted as. */
enum kind { OTHER, READ, METADATA, LIST, PUT, BEGIN, PART, COMPLETE, COMPOSE, DELETE, BUCKET, PERMISSIONS, KINDS };

/* The request being served. `held_from` to `held_to` of `head` are bytes that were received and not used. */
struct request {
    int socket;
    char head[HEAD_BYTES + 1];
    long held_from, held_to;
    char method[8], name[NAME_BYTES], query[NAME_BYTES], range[64], content_range[64], hash[64], host[128];
    char copied[NAME_BYTES]; /* what a PUT copies, decoded, or "" */
    long content_length; /* -1: chunked */
    long decoded_length; /* of an aws-chunked body; otherwise -1 */
    int expects, closes;
};

/* All return -1 if the connection broke. */

/* A response with `body`, or one whose `length` bytes the caller sends or omits. */
int answer(struct request *r, const char *status, const char *headers, const char *body, long length);
int refuse(struct request *r, const char *status, const char *code);
/* Answers a GET or HEAD, with `headers` besides those of any store. */
int send_blob(struct request *r, struct blob *blob, const char *headers);
/* Sends "100 Continue" if the client waits for it. */
int proceed(struct request *r);
/* Receives `length` bytes of a body into `file` at `at`, or discards them without a copy. */
int take(struct request *r, long length, int file, long at);
/* Receives `length` bytes into memory. */
int take_text(struct request *r, char *text, long length);
/* Receives at least one more byte into `head`, behind the held ones. */
int take_more(struct request *r);
/* The whole body; NULL if the connection broke. */
struct blob *take_body(struct request *r, int keep);

/* Counts a request whose body has been received, and waits for the latency. */
void count(enum kind kind);
/* A value of a query, decoded, in `value` of NAME_BYTES; NULL if it is not there. */
char *parameter(const char *query, const char *name, char *value);
/* Whether the bytes of objects of the bucket that `name` begins with are kept. */
int keeps(const char *name);

/* Whether `r` is a request of the JSON API; answers it. */
int gcs_is(const struct request *r);
int gcs_respond(struct request *r);

#endif
