/*
 * The JSON API of Google Cloud Storage as far as uploads and reads need it: multipart inserts, resumable sessions, compose,
 * delete, metadata, media. Every object has generation 1; conditions are ignored. CRC32C is that of the bytes if they are
 * kept, otherwise what the client sent, if it did; that of a composed object follows from those of its sources.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/mman.h>

#include "origin.h"

/* The longest closing delimiter, with a part of checksums before it; the longest JSON text; and the API's own limit. */
enum { TAIL_BYTES = 1024, TEXT_BYTES = 256 << 10, MAX_SOURCES = 32 };

#define API "storage/v1/b/"
#define TIME "2026-01-01T00:00:00.000Z"
#define HEADERS "x-goog-generation: 1\r\nx-goog-metageneration: 1\r\nx-goog-storage-class: STANDARD\r\n" \
    "x-goog-stored-content-encoding: identity\r\n"

/* What follows the API's path: "BUCKET", "BUCKET/o", "BUCKET/o/NAME"; NULL for other requests. */
static const char *resource_of(const struct request *r, const char *prefix) {
    size_t length = strlen(prefix);
    if (strncmp(r->name, prefix, length) || strncmp(r->name + length, API, strlen(API))) return NULL;
    return r->name + length + strlen(API);
}

int gcs_is(const struct request *r) {
    return resource_of(r, "") || resource_of(r, "upload/") || resource_of(r, "download/");
}

/* The value of a field in JSON, a string without \u; NULL if it is not there before `end`. */
static char *text_of(const char *json, const char *end, const char *field, char *value) {
    char quoted[64], *to = value;
    int length = snprintf(quoted, sizeof quoted, "\"%s\"", field);
    const char *at = memmem(json, end - json, quoted, length);
    if (!at) return NULL;
    at += length;
    at += strspn(at, " :\r\n\t");
    if (*at++ != '"') return NULL;
    for (; at < end && *at != '"' && to < value + NAME_BYTES - 1; at++) *to++ = *at == '\\' ? *++at : *at;
    *to = 0;
    return value;
}

/* A copy of the value of a field in JSON that is an object without objects in it; NULL if it is not there. */
static char *object_of(const char *json, const char *end, const char *field) {
    char quoted[64];
    const char *at = memmem(json, end - json, quoted, snprintf(quoted, sizeof quoted, "\"%s\"", field));
    if (!at || !(at = memchr(at, '{', end - at))) return NULL;
    int is_text = 0;
    for (const char *to = at; to < end; to++) {
        if (*to == '\\') to++;
        else if (*to == '"') is_text = !is_text;
        else if (*to == '}' && !is_text) return strndup(at, to + 1 - at);
    }
    return NULL;
}

/* What the CRC32C of bytes becomes if `length` others follow, whose own CRC32C is to be added by xor: a product of
   polynomials in GF(2), as in zlib's crc32_combine. */
static uint32_t shifted(uint32_t crc, long length) {
    uint32_t power = 0x00800000; /* x^8, a byte; the highest power is the lowest bit */
    for (; length; length >>= 1) {
        uint32_t product = 0, square = 0;
        for (uint32_t bit = 1u << 31, c = crc, s = power; bit; bit >>= 1) {
            if (power & bit) product ^= c, square ^= s;
            c = c >> 1 ^ (c & 1 ? 0x82f63b78 : 0), s = s >> 1 ^ (s & 1 ? 0x82f63b78 : 0);
        }
        if (length & 1) crc = product;
        power = square;
    }
    return crc;
}

static void compute(struct blob *blob) {
    uint32_t table[256], crc = ~0u;
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0x82f63b78 : 0);
    }
    unsigned char *bytes = blob->size ? mmap(NULL, blob->size, PROT_READ, MAP_SHARED, blob->file, 0) : NULL;
    if (bytes == MAP_FAILED) return;
    for (long i = 0; i < blob->size; i++) crc = crc >> 8 ^ table[(crc ^ bytes[i]) & 255];
    if (bytes) munmap(bytes, blob->size);
    blob->crc32c = ~crc;
    blob->is_summed = 1;
}

/* Whether the CRC32C of a blob is known. It is computed once, at its first use, if its bytes are kept. */
static int sum(struct blob *blob) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!blob->is_summed && blob->file >= 0) compute(blob);
    pthread_mutex_unlock(&lock);
    return blob->is_summed;
}

static const char base64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* Writes a CRC32C as the API has it: eight characters, of which the last two are padding. */
static char *encode(uint32_t crc32c, char *text) {
    uint64_t bits = (uint64_t)crc32c << 4;
    for (int i = 5; i >= 0; i--, bits >>= 6) text[i] = base64[bits & 63];
    strcpy(text + 6, "==");
    return text;
}

/* Keeps the CRC32C that a client sent for bytes that are discarded. */
static void decode(struct blob *blob, const char *text) {
    uint64_t bits = 0;
    if (blob->file >= 0 || strlen(text) < 6) return;
    for (int i = 0; i < 6; i++) {
        const char *digit = strchr(base64, text[i]);
        if (!digit) return;
        bits = bits << 6 | (digit - base64);
    }
    blob->crc32c = bits >> 4, blob->is_summed = 1;
}

/* Answers with the resource of an object whose name begins with its bucket. Releases the blob. */
static int send_resource(struct request *r, const char *name, struct blob *blob) {
    char body[8 * NAME_BYTES], crc32c[9], extra[64] = "";
    const char *key = strchr(name, '/') + 1;
    if (sum(blob)) snprintf(extra, sizeof extra, ",\"crc32c\":\"%s\"", encode(blob->crc32c, crc32c));
    snprintf(body, sizeof body, "{\"kind\":\"storage#object\",\"bucket\":\"%.*s\",\"name\":\"%s\",\"generation\":\"1\","
        "\"metageneration\":\"1\",\"storageClass\":\"STANDARD\",\"contentType\":\"application/octet-stream\","
        "\"timeCreated\":\"" TIME "\",\"updated\":\"" TIME "\",\"etag\":\"CAE=\",\"size\":\"%ld\"%s%s%.4096s}",
        (int)(key - 1 - name), name, key, blob->size, extra, blob->metadata ? ",\"metadata\":" : "",
        blob->metadata ? blob->metadata : "");
    blob_release(blob);
    return answer(r, "200 OK", "", body, 0);
}

/* Stores an object, and answers with its resource. */
static int store(struct request *r, const char *name, struct blob *blob) {
    sum(blob);
    objects_put(name, blob);
    blob = objects_get(name);
    return blob ? send_resource(r, name, blob) : refuse(r, "404 Not Found", "notFound");
}

/* Receives a small body as text that ends with 0. */
static char *take_json(struct request *r) {
    static __thread char *text;
    if (!text) text = malloc(TEXT_BYTES + 1);
    if (r->content_length < 0 || r->content_length > TEXT_BYTES || proceed(r)) return NULL;
    if (take_text(r, text, r->content_length)) return NULL;
    text[r->content_length] = 0;
    return text;
}

/* The first byte after a blank line, or NULL. */
static const char *after_blank(const char *from, const char *end) {
    for (; from < end; from++) {
        if (end - from >= 4 && !memcmp(from, "\r\n\r\n", 4)) return from + 4;
        if (end - from >= 2 && !memcmp(from, "\n\n", 2)) return from + 2;
    }
    return NULL;
}

/* The multipart body that starts at `from`: the length up to the media; the length of the delimiter, which is the
   first line; and the bounds of the JSON. 0 if not all of it was received. */
static long opening(const char *from, const char *end, long *delimiter, const char **json, const char **json_end) {
    const char *line = memchr(from, '\n', end - from);
    if (!line) return 0;
    *delimiter = line - from - (line > from && line[-1] == '\r');
    if (!(*json = after_blank(from, end))) return 0;
    if (!(*json_end = memmem(*json, end - *json, from, *delimiter))) return 0;
    const char *media = after_blank(*json_end, end);
    return media ? media - from : 0;
}

static int insert(struct request *r, const char *bucket, int bucket_length) {
    char value[NAME_BYTES], name[2 * NAME_BYTES], crc32c[NAME_BYTES] = "", first[256], tail[TAIL_BYTES];
    const char *json, *json_end;
    long delimiter, before;
    if (proceed(r)) return -1;
    while (!(before = opening(r->head + r->held_from, r->head + r->held_to, &delimiter, &json, &json_end)))
        if (take_more(r)) return -1;
    if (r->content_length < before || delimiter > (long)sizeof first) return -1;
    if (!parameter(r->query, "name", value) && !text_of(json, json_end, "name", value)) return -1;
    text_of(json, json_end, "crc32c", crc32c);
    char *metadata = object_of(json, json_end, "metadata");
    snprintf(name, sizeof name, "%.*s/%s", bucket_length, bucket, value);
    memcpy(first, r->head + r->held_from, delimiter);
    r->held_from += before;
    long rest = r->content_length - before, last = rest < TAIL_BYTES ? rest : TAIL_BYTES;
    int file = keeps(name) ? memfd_create("object", MFD_CLOEXEC) : -1;
    if (take(r, rest - last, file, 0) || take_text(r, tail, last)) return -1;
    const char *end = memmem(tail, last, first, delimiter);
    if (!end) return refuse(r, "400 Bad Request", "invalid");
    /* The line break before the delimiter is not content. */
    long more = end - tail - 1;
    if (more > 0 && tail[more - 1] == '\r') more--;
    if (file >= 0 && pwrite(file, tail, more, rest - last) != more) return -1;
    count(PUT);
    struct blob *blob = blob_new(rest - last + more, file);
    decode(blob, crc32c);
    blob->metadata = metadata;
    return store(r, name, blob);
}

static int begin_session(struct request *r, const char *bucket, int bucket_length) {
    char value[NAME_BYTES], name[2 * NAME_BYTES], headers[3 * NAME_BYTES], *text = take_json(r);
    if (!text) return -1;
    if (!parameter(r->query, "name", value) && !text_of(text, text + r->content_length, "name", value)) return -1;
    count(BEGIN);
    snprintf(name, sizeof name, "%.*s/%s", bucket_length, bucket, value);
    int used = snprintf(headers, sizeof headers, "Location: http://%s/upload/" API "%.*s/o?uploadType=resumable&upload_id=%ld"
        "&name=", r->host, bucket_length, bucket, upload_begin(name));
    for (const char *at = value; *at && used < (int)sizeof headers - 8; at++)
        used += sprintf(headers + used, "%%%02X", (unsigned char)*at);
    strcpy(headers + used, "\r\n");
    return answer(r, "200 OK", headers, "", 0);
}

/* A part of a resumable upload, or a query how much of it was received. */
static int session(struct request *r, const char *bucket, int bucket_length, long id) {
    char value[NAME_BYTES] = "", name[2 * NAME_BYTES], headers[64] = "";
    parameter(r->query, "name", value);
    snprintf(name, sizeof name, "%.*s/%s", bucket_length, bucket, value);
    struct blob *part = take_body(r, keeps(name));
    if (!part) return -1;
    count(PART);
    const char *total = strchr(r->content_range, '/');
    long received = upload_append(id, part);
    if (received < 0) return refuse(r, "410 Gone", "gone");
    if (total && (total[1] == '*' || received < atol(total + 1))) {
        if (received) snprintf(headers, sizeof headers, "Range: bytes=0-%ld\r\n", received - 1);
        return answer(r, "308 Resume Incomplete", headers, "", 0);
    }
    if (!upload_complete(id)) return refuse(r, "410 Gone", "gone");
    struct blob *blob = objects_get(name);
    if (!blob) return refuse(r, "404 Not Found", "notFound");
    if (!strncmp(r->hash, "crc32c=", 7)) decode(blob, r->hash + 7);
    return send_resource(r, name, blob);
}

static int compose(struct request *r, const char *bucket, int bucket_length, const char *target) {
    char value[NAME_BYTES], name[2 * NAME_BYTES], *text = take_json(r), *end;
    if (!text) return -1;
    count(COMPOSE);
    char *at = strstr(text, "\"sourceObjects\"");
    if (!at || !(end = strchr(at, ']'))) return refuse(r, "400 Bad Request", "invalid");
    struct blob *whole = blob_new(0, -1);
    int sources = 0, found = 1, is_summed = 1;
    uint32_t crc32c = 0;
    whole->metadata = object_of(end, text + r->content_length, "metadata");
    for (; found && (at = memmem(at, end - at, "\"name\"", 6)); at++, sources++) {
        text_of(at, end, "name", value);
        snprintf(name, sizeof name, "%.*s/%s", bucket_length, bucket, value);
        struct blob *part = objects_get(name);
        if (!(found = part != NULL)) break;
        is_summed &= sum(part);
        crc32c = shifted(crc32c, part->size) ^ part->crc32c;
        blob_append(whole, part);
        blob_release(part);
    }
    if (!found || !sources || sources > MAX_SOURCES) {
        blob_release(whole);
        return found ? refuse(r, "400 Bad Request", "invalid") : refuse(r, "404 Not Found", "notFound");
    }
    whole->crc32c = crc32c, whole->is_summed = is_summed;
    return store(r, target, whole);
}

static int respond_object(struct request *r, const char *name) {
    char value[NAME_BYTES], *media = parameter(r->query, "alt", value);
    int is_get = !strcmp(r->method, "GET"), is_media = is_get && media && !strcmp(media, "media");
    struct blob *ignored = take_body(r, 0);
    if (!ignored) return -1;
    blob_release(ignored);
    count(!strcmp(r->method, "DELETE") ? DELETE : is_media ? READ : METADATA);
    struct blob *blob = objects_get(name);
    if (!blob) return refuse(r, "404 Not Found", "notFound");
    if (!is_media && strcmp(r->method, "DELETE")) return send_resource(r, name, blob);
    int failed, used = 0;
    char headers[512], crc32c[9];
    if (is_media) {
        used = snprintf(headers, sizeof headers, HEADERS "x-goog-stored-content-length: %ld\r\n", blob->size);
        if (sum(blob)) sprintf(headers + used, "x-goog-hash: crc32c=%s\r\n", encode(blob->crc32c, crc32c));
        failed = send_blob(r, blob, headers);
    } else {
        objects_delete(name);
        failed = answer(r, "204 No Content", "", NULL, 0);
    }
    blob_release(blob);
    return failed;
}

/* All permissions that were asked for. */
static int send_permissions(struct request *r) {
    char body[2 * NAME_BYTES], value[NAME_BYTES];
    int used = sprintf(body, "{\"permissions\":[");
    for (const char *at = r->query; (at = strstr(at, "permissions=")); at++)
        used += snprintf(body + used, sizeof body - used, "%s\"%.60s\"", body[used - 1] == '[' ? "" : ",",
            parameter(at, "permissions", value));
    strcpy(body + used, "]}");
    count(PERMISSIONS);
    return answer(r, "200 OK", "", body, 0);
}

int gcs_respond(struct request *r) {
    char value[NAME_BYTES], name[NAME_BYTES], body[512];
    const char *sent = resource_of(r, "upload/"), *plain = resource_of(r, "");
    const char *bucket = sent ? sent : plain ? plain : resource_of(r, "download/");
    int length = strcspn(bucket, "/");
    const char *key = !strncmp(bucket + length, "/o/", 3) ? bucket + length + 3 : NULL;
    if (sent) {
        if (parameter(r->query, "upload_id", value)) return session(r, bucket, length, atol(value));
        int resumable = parameter(r->query, "uploadType", value) && !strcmp(value, "resumable");
        return resumable ? begin_session(r, bucket, length) : insert(r, bucket, length);
    }
    if (key) {
        long key_length = strlen(key), suffix = strlen("/compose");
        int composes = !strcmp(r->method, "POST") && key_length > suffix && !strcmp(key + key_length - suffix, "/compose");
        snprintf(name, sizeof name, "%.*s/%.*s", length, bucket, (int)(key_length - (composes ? suffix : 0)), key);
        return composes ? compose(r, bucket, length, name) : respond_object(r, name);
    }
    if (strstr(bucket, "/iam/testPermissions")) return send_permissions(r);
    if (!strcmp(bucket + length, "/o")) {
        count(LIST);
        return answer(r, "200 OK", "", "{\"kind\":\"storage#objects\"}", 0);
    }
    count(BUCKET);
    snprintf(body, sizeof body, "{\"kind\":\"storage#bucket\",\"id\":\"%.*s\",\"name\":\"%.*s\",\"location\":\"US\","
        "\"locationType\":\"multi-region\",\"storageClass\":\"STANDARD\",\"metageneration\":\"1\",\"etag\":\"CAE=\"}",
        length, bucket, length, bucket);
    return answer(r, "200 OK", "", body, 0);
}
