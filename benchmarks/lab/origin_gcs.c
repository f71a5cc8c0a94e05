/*
 * The JSON API of Google Cloud Storage as far as uploads and reads need it: multipart inserts, resumable sessions, compose,
 * delete, metadata, media. Every object has generation 1; conditions are ignored. The checksum of an upload
 * is returned as the client sent it; other answers have none.
 */
#define _GNU_SOURCE
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

/* Answers with the resource of an object whose name begins with its bucket. */
static int send_resource(struct request *r, const char *name, long size, const char *crc32c) {
    char body[2 * NAME_BYTES], extra[64] = "";
    const char *key = strchr(name, '/') + 1;
    if (crc32c && *crc32c) snprintf(extra, sizeof extra, ",\"crc32c\":\"%.8s\"", crc32c);
    snprintf(body, sizeof body, "{\"kind\":\"storage#object\",\"bucket\":\"%.*s\",\"name\":\"%s\",\"generation\":\"1\","
        "\"metageneration\":\"1\",\"storageClass\":\"STANDARD\",\"contentType\":\"application/octet-stream\","
        "\"timeCreated\":\"" TIME "\",\"updated\":\"" TIME "\",\"etag\":\"CAE=\",\"size\":\"%ld\"%s}",
        (int)(key - 1 - name), name, key, size, extra);
    return answer(r, "200 OK", "", body, 0);
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
    objects_put(name, blob_new(rest - last + more, file));
    return send_resource(r, name, rest - last + more, crc32c);
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
    return send_resource(r, name, received, strncmp(r->hash, "crc32c=", 7) ? NULL : r->hash + 7);
}

static int compose(struct request *r, const char *bucket, int bucket_length, const char *target) {
    char value[NAME_BYTES], name[2 * NAME_BYTES], *text = take_json(r), *end;
    if (!text) return -1;
    count(COMPOSE);
    char *at = strstr(text, "\"sourceObjects\"");
    if (!at || !(end = strchr(at, ']'))) return refuse(r, "400 Bad Request", "invalid");
    struct blob *whole = blob_new(0, -1);
    int sources = 0, found = 1;
    for (; found && (at = memmem(at, end - at, "\"name\"", 6)); at++, sources++) {
        text_of(at, end, "name", value);
        snprintf(name, sizeof name, "%.*s/%s", bucket_length, bucket, value);
        struct blob *part = objects_get(name);
        if ((found = part != NULL)) blob_append(whole, part), blob_release(part);
    }
    if (!found || !sources || sources > MAX_SOURCES) {
        blob_release(whole);
        return found ? refuse(r, "400 Bad Request", "invalid") : refuse(r, "404 Not Found", "notFound");
    }
    long size = whole->size;
    objects_put(target, whole);
    return send_resource(r, target, size, NULL);
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
    int failed;
    if (!strcmp(r->method, "DELETE")) {
        objects_delete(name);
        failed = answer(r, "204 No Content", "", NULL, 0);
    } else {
        failed = is_media ? send_blob(r, blob, HEADERS) : send_resource(r, name, blob->size, NULL);
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
