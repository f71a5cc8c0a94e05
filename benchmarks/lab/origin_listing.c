#define _GNU_SOURCE
#include "origin_listing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BUCKETS = 16, PAGE_KEYS = 1000, ENTRY_BYTES = 320 };

#define XMLNS " xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\""

struct bucket {
    char *name, *text, *entries;
    char **keys; /* NULL if keys are computed */
    size_t *starts; /* of entries, and the end of the last */
    long count;
    int is_random;
};

/* Written before the first thread starts. */
static struct bucket buckets[MAX_BUCKETS];
static int bucket_count;

static unsigned long hash_of(const char *key) {
    unsigned long hash = 1469598103934665603ul;
    for (; *key; key++) hash = (hash ^ (unsigned char)*key) * 1099511628211ul;
    return hash;
}

static long size_of(const char *key) {
    return 1024 + hash_of(key) % (1 << 20);
}

static void render(struct bucket *bucket) {
    size_t capacity = (size_t)bucket->count * ENTRY_BYTES, used = 0;
    bucket->entries = malloc(capacity + ENTRY_BYTES);
    bucket->starts = malloc((bucket->count + 1) * sizeof *bucket->starts);
    for (long i = 0; i < bucket->count; i++) {
        const char *key = bucket->keys[i];
        bucket->starts[i] = used;
        if (used + strlen(key) + ENTRY_BYTES > capacity)
            bucket->entries = realloc(bucket->entries, capacity = capacity * 2 + strlen(key) + ENTRY_BYTES);
        /* As S3 writes it, with the fields in this order and quotes escaped. */
        used += sprintf(bucket->entries + used, "<Contents><Key>%s</Key><LastModified>2026-01-01T00:%02lu:%02lu.000Z"
            "</LastModified><ETag>&quot;%016lx%016lx&quot;</ETag><Size>%ld</Size><StorageClass>STANDARD</StorageClass>"
            "</Contents>", key, hash_of(key) % 60, hash_of(key) / 60 % 60, hash_of(key), ~hash_of(key), size_of(key));
    }
    bucket->starts[bucket->count] = used;
}

/* The key of an index, in `text` of 32 bytes if it is computed. Random digits are in order: the gap before each is random. */
static const char *key_at(const struct bucket *bucket, long index, char *text) {
    if (bucket->keys) return bucket->keys[index];
    unsigned long step = ~0ul / bucket->count, hash = index * 0x9e3779b97f4a7c15ul;
    hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9ul;
    if (bucket->is_random) snprintf(text, 32, "%016lx%08lx", index * step + (hash ^ hash >> 32) % step, hash >> 32);
    else snprintf(text, 32, "train/%014ld.jpg", index);
    return text;
}

/* Writes the entries of consecutive keys. */
static void write_entries(FILE *out, const struct bucket *bucket, long from, long to) {
    char text[32], etag[64] = "";
    if (bucket->keys) {
        fwrite(bucket->entries + bucket->starts[from], 1, bucket->starts[to] - bucket->starts[from], out);
        return;
    }
    for (; from < to; from++) {
        const char *key = key_at(bucket, from, text);
        if (bucket->is_random) sprintf(etag, "<ETag>&quot;%016lx%016lx&quot;</ETag>", hash_of(key), ~hash_of(key));
        fprintf(out, "<Contents><Key>%s</Key>%s<Size>%ld</Size></Contents>", key, etag, 100000 + from * 7919 % 60000);
    }
}

int listing_load(const char *path) {
    if (bucket_count == MAX_BUCKETS) return 0;
    struct bucket *bucket = &buckets[bucket_count];
    int is_computed = !strncmp(path, "numbered:", 9) || !strncmp(path, "random:", 7);
    if (is_computed) {
        bucket->is_random = *path == 'r';
        bucket->name = strndup(path, strcspn(path, ":"));
        bucket->count = atol(strchr(path, ':') + 1);
        return bucket->count > 0 && ++bucket_count;
    }
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    bucket_count++;
    fseek(file, 0, SEEK_END);
    long size = ftell(file), capacity = 0;
    rewind(file);
    bucket->name = strdup(strrchr(path, '/') ? strrchr(path, '/') + 1 : path);
    bucket->text = malloc(size + 1);
    bucket->text[fread(bucket->text, 1, size, file)] = 0;
    fclose(file);
    for (char *line = strtok(bucket->text, "\n"); line; line = strtok(NULL, "\n")) {
        if (bucket->count == capacity)
            bucket->keys = realloc(bucket->keys, (capacity = capacity ? capacity * 2 : 1024) * sizeof *bucket->keys);
        bucket->keys[bucket->count++] = line;
    }
    render(bucket);
    return 1;
}

static struct bucket *find(const char *name) {
    size_t length = strcspn(name, "/");
    for (int i = 0; i < bucket_count; i++)
        if (strlen(buckets[i].name) == length && !strncmp(buckets[i].name, name, length)) return &buckets[i];
    return NULL;
}

int listing_is(const char *name) {
    return find(name) != NULL;
}

/* The first key that is not before `text`, of which the first `length` bytes are compared; with `after` the first behind
   all that begin with them. */
static long bound(const struct bucket *bucket, const char *text, size_t length, int after) {
    long low = 0, high = bucket->count;
    char key[32];
    while (low < high) {
        long middle = low + (high - low) / 2;
        int order = strncmp(key_at(bucket, middle, key), text, length);
        if (order < 0 || (after && !order)) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int send_page(struct request *r, const struct bucket *bucket) {
    char prefix[NAME_BYTES] = "", delimiter[NAME_BYTES] = "", value[NAME_BYTES];
    parameter(r->query, "prefix", prefix);
    parameter(r->query, "delimiter", delimiter);
    size_t length = strlen(prefix), size;
    long at = bound(bucket, prefix, length, 0), end = bound(bucket, prefix, length, 1), most = PAGE_KEYS, sent = 0;
    if (parameter(r->query, "max-keys", value) && atol(value) < most) most = atol(value);
    if (parameter(r->query, "continuation-token", value)) {
        at = atol(value);
    } else if (parameter(r->query, "start-after", value)) {
        /* Compared with the ending zero: only the same key is not after itself. */
        long after = bound(bucket, value, strlen(value) + 1, 1);
        if (after > at) at = after;
    }
    char *body = NULL, *groups = NULL;
    size_t groups_size;
    FILE *out = open_memstream(&body, &size), *prefixes = open_memstream(&groups, &groups_size);
    fprintf(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult" XMLNS "><Name>%s</Name>", bucket->name);
    if (parameter(r->query, "encoding-type", value)) fputs("<EncodingType>url</EncodingType>", out);
    if (!*delimiter && at < end) {
        sent = end - at < most ? end - at : most;
        write_entries(out, bucket, at, at + sent);
        at += sent;
    }
    for (; *delimiter && at < end && sent < most; sent++) {
        char text[32];
        const char *key = key_at(bucket, at, text), *found = strstr(key + length, delimiter);
        if (!found) {
            write_entries(out, bucket, at, at + 1);
            at++;
            continue;
        }
        size_t group = found + strlen(delimiter) - key;
        fprintf(prefixes, "<CommonPrefixes><Prefix>%.*s</Prefix></CommonPrefixes>", (int)group, key);
        at = bound(bucket, key, group, 1);
    }
    fclose(prefixes);
    fprintf(out, "%s<Prefix>%s</Prefix><MaxKeys>%ld</MaxKeys><KeyCount>%ld</KeyCount>", groups, prefix, most, sent);
    if (at < end) fprintf(out, "<IsTruncated>true</IsTruncated><NextContinuationToken>%ld</NextContinuationToken>", at);
    else fputs("<IsTruncated>false</IsTruncated>", out);
    fputs("</ListBucketResult>", out);
    fclose(out);
    int failed = answer(r, "200 OK", "", body, 0);
    free(groups);
    free(body);
    return failed;
}

int listing_respond(struct request *r, int is_bucket) {
    const struct bucket *bucket = find(r->name);
    if (is_bucket) return strcmp(r->method, "HEAD") ? send_page(r, bucket) : answer(r, "200 OK", "", NULL, 0);
    const char *key = strchr(r->name, '/') + 1;
    char text[32];
    long at = bound(bucket, key, strlen(key) + 1, 0);
    if (at == bucket->count || strcmp(key_at(bucket, at, text), key)) return refuse(r, "404 Not Found", "NoSuchKey");
    if (strcmp(r->method, "HEAD")) return refuse(r, "501 Not Implemented", "NotImplemented");
    char headers[512];
    snprintf(headers, sizeof headers, "ETag: \"%016lx%016lx\"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
        "Accept-Ranges: bytes\r\nx-amz-meta-label: %lu\r\nx-amz-meta-owner: bench\r\n", hash_of(key), ~hash_of(key),
        hash_of(key) % 1000);
    return answer(r, "200 OK", headers, NULL, size_of(key));
}
