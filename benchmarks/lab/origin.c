/*
 * The cheapest server of S3 and Google Cloud Storage that accepts uploads. It receives objects of the bucket "discard"
 * without a copy, and keeps only their sizes; it keeps objects of any other bucket in memory, and sends them by sendfile.
 * Verifies no signature and no checksum, and gives every object the same ETag. origin_objects.c stores objects,
 * origin_gcs.c answers the JSON API, origin_listing.c lists buckets of keys without bytes.
 *
 *     origin LATENCY_MS [KEYS...]     prints its port, and serves until its stdin ends; KEYS are files of keys, or KIND:COUNT
 *
 * One thread per connection: clients have few, and keep them. GET /-/counters returns the number of requests of each kind,
 * of bytes of bodies that were received and sent, and of faults. GET /-/set?rate=B&reset=N&silence=M limits what all
 * connections together send to B bytes per second, resets a connection in the middle of one body in N, and is silent for
 * 1.5 s in the middle of one in M: of the bodies of at least 1 MiB, counted from then on. What is not named is off. Linux
 * only.
 */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "origin.h"
#include "origin_listing.h"

enum { COPIED_BYTES = 1 << 20, PACED_BYTES = 256 << 10, FAULTY_BYTES = 1 << 20, SILENCE_US = 1500000 };
/* Longer than a sleep is late, and shorter than a pause of the clients. */
enum { BILLION = 1000000000, LATE_NS = 10000000 };

#define XMLNS " xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\""
#define ETAG "ETag: \"9b2cf535f27731c974343645a3985328\"\r\n"
#define VALIDATORS ETAG "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n"

static const char *const kind_names[KINDS] = {"other", "read", "metadata", "list", "put", "begin", "part", "complete",
    "compose", "delete", "bucket", "permissions"};
static atomic_long received_bytes, sent_bytes, kinds[KINDS];
static atomic_long rate, reset_every, silence_every, bodies, faults;
static long latency_us;

static int send_all(int socket, const char *data, long length, int flags) {
    while (length > 0) {
        long sent = send(socket, data, length, flags);
        if (sent <= 0) return -1;
        data += sent, length -= sent;
    }
    return 0;
}

int answer(struct request *r, const char *status, const char *headers, const char *body, long length) {
    char head[4 * NAME_BYTES];
    long size = body ? (long)strlen(body) : length;
    const char *type = body && *body == '<' ? "application/xml" : body && *body == '{' ? "application/json"
        : "application/octet-stream";
    int used = snprintf(head, sizeof head, "HTTP/1.1 %s\r\nServer: origin\r\nContent-Type: %s\r\nContent-Length: %ld\r\n"
        "x-amz-request-id: 0\r\n%s\r\n", status, type, size, headers);
    if (send_all(r->socket, head, used, body && *body ? MSG_MORE : 0)) return -1;
    return body ? send_all(r->socket, body, size, 0) : 0;
}

int refuse(struct request *r, const char *status, const char *code) {
    char body[128];
    snprintf(body, sizeof body, "<Error><Code>%s</Code></Error>", code);
    return answer(r, status, "", strcmp(r->method, "HEAD") ? body : NULL, 0);
}

int take(struct request *r, long length, int file, long at) {
    static __thread char *buffer;
    atomic_fetch_add(&received_bytes, length);
    long held = r->held_to - r->held_from < length ? r->held_to - r->held_from : length;
    if (file >= 0 && pwrite(file, r->head + r->held_from, held, at) != held) return -1;
    r->held_from += held, length -= held, at += held;
    if (file >= 0 && !buffer) buffer = malloc(COPIED_BYTES);
    while (length > 0) {
        long got;
        if (file < 0) got = recv(r->socket, NULL, length, MSG_TRUNC);
        else got = recv(r->socket, buffer, length < COPIED_BYTES ? length : COPIED_BYTES, 0);
        if (got <= 0 || (file >= 0 && pwrite(file, buffer, got, at) != got)) return -1;
        length -= got, at += got;
    }
    return 0;
}

int take_text(struct request *r, char *text, long length) {
    atomic_fetch_add(&received_bytes, length);
    long held = r->held_to - r->held_from < length ? r->held_to - r->held_from : length;
    memcpy(text, r->head + r->held_from, held);
    r->held_from += held;
    return held < length && recv(r->socket, text + held, length - held, MSG_WAITALL) != length - held ? -1 : 0;
}

int take_more(struct request *r) {
    memmove(r->head, r->head + r->held_from, r->held_to - r->held_from);
    r->held_to -= r->held_from, r->held_from = 0;
    long got = recv(r->socket, r->head + r->held_to, HEAD_BYTES - r->held_to, 0);
    if (got <= 0) return -1;
    r->held_to += got;
    return 0;
}

/* The next line of a chunked body, without its end. */
static int take_line(struct request *r, char *text, int most) {
    for (int length = 0;;) {
        if (r->held_from == r->held_to) {
            long got = recv(r->socket, r->head, HEAD_BYTES, 0);
            if (got <= 0) return -1;
            r->held_from = 0, r->held_to = got;
        }
        char next = r->head[r->held_from++];
        if (next != '\r' && next != '\n' && length < most - 1) text[length++] = next;
        text[length] = 0;
        if (next == '\n') return 0;
    }
}

/* Receives chunks and trailers, of HTTP or aws-chunked, which look alike. Returns the size of their content. */
static long take_chunks(struct request *r, int file) {
    char text[512];
    for (long size = 0; !take_line(r, text, sizeof text);) {
        long chunk = strtol(text, NULL, 16);
        if (!chunk) {
            while (*text)
                if (take_line(r, text, sizeof text)) return -1;
            return size;
        }
        if (take(r, chunk, file, size) || take_line(r, text, sizeof text)) return -1;
        size += chunk;
    }
    return -1;
}

int proceed(struct request *r) {
    return r->expects ? send_all(r->socket, "HTTP/1.1 100 Continue\r\n\r\n", 25, 0) : 0;
}

struct blob *take_body(struct request *r, int keep) {
    if (proceed(r)) return NULL;
    int file = keep ? memfd_create("object", MFD_CLOEXEC) : -1;
    int chunked = r->content_length < 0 || (keep && r->decoded_length >= 0);
    long size = chunked ? take_chunks(r, file) : r->content_length;
    if (size >= 0 && (chunked || !take(r, size, file, 0)))
        return blob_new(r->decoded_length >= 0 ? r->decoded_length : size, file);
    if (file >= 0) close(file);
    return NULL;
}

void count(enum kind kind) {
    atomic_fetch_add(&kinds[kind], 1);
    if (latency_us) usleep(latency_us);
}

int keeps(const char *name) {
    return strncmp(name, "discard/", 8) != 0;
}

char *parameter(const char *query, const char *name, char *value) {
    long length = strlen(name);
    for (const char *at = query; at && *at; at = strchr(at, '&') ? strchr(at, '&') + 1 : NULL) {
        if (strncmp(at, name, length) || (at[length] && !strchr("=&", at[length]))) continue;
        char *to = value;
        for (at += length + (at[length] == '='); *at && *at != '&'; at++) {
            unsigned byte = *at;
            if (byte == '%' && sscanf(at + 1, "%2x", &byte) == 1) at += 2;
            *to++ = byte;
        }
        *to = 0;
        return value;
    }
    return NULL;
}

/* Waits until `length` bytes may be sent at the rate of all connections; what was not sent in time is made up for. */
static void pace(long length) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static long next_ns;
    struct timespec time;
    long limit = rate;
    if (!limit) return;
    clock_gettime(CLOCK_MONOTONIC, &time);
    long now_ns = time.tv_sec * BILLION + time.tv_nsec;
    pthread_mutex_lock(&lock);
    if (next_ns < now_ns - LATE_NS) next_ns = now_ns - LATE_NS;
    long wait_ns = next_ns - now_ns;
    next_ns += length * BILLION / limit;
    pthread_mutex_unlock(&lock);
    if (wait_ns > 0) usleep(wait_ns / 1000);
}

/* Whether the fault happens that one body in `every` has: the first time after half as many. */
static int has_fault(long body, long every) {
    if (!every || body % every != every / 2) return 0;
    atomic_fetch_add(&faults, 1);
    return 1;
}

/* Sends bytes of a blob; -1 if the connection broke. */
static int send_range(struct request *r, struct blob *blob, long from, long to) {
    for (off_t at = from; at < to;) {
        long length = rate && to - at > PACED_BYTES ? PACED_BYTES : to - at;
        pace(length);
        long sent = sendfile(r->socket, blob->file, &at, length);
        if (sent <= 0) return -1;
        atomic_fetch_add(&sent_bytes, sent);
    }
    return 0;
}

int send_blob(struct request *r, struct blob *blob, const char *more) {
    long from = 0, to = blob->size, first, last;
    int bounds = sscanf(r->range, "bytes=%ld-%ld", &first, &last);
    if (bounds > 0 && first < 0) from = to + first > 0 ? to + first : 0;
    else if (bounds > 0) from = first;
    if (bounds == 2 && last < to) to = last + 1;
    if (bounds > 0 && from >= blob->size) return refuse(r, "416 Range Not Satisfiable", "InvalidRange");
    char headers[1024];
    snprintf(headers, sizeof headers, VALIDATORS "%s", more);
    if (bounds > 0)
        sprintf(headers + strlen(headers), "Content-Range: bytes %ld-%ld/%ld\r\n", from, to - 1, blob->size);
    if (answer(r, bounds > 0 ? "206 Partial Content" : "200 OK", headers, NULL, to - from)) return -1;
    if (!strcmp(r->method, "HEAD")) return 0;
    if (to - from < FAULTY_BYTES) return send_range(r, blob, from, to);
    long middle = from + (to - from) / 2, body = atomic_fetch_add(&bodies, 1);
    if (send_range(r, blob, from, middle)) return -1;
    if (has_fault(body, silence_every)) usleep(SILENCE_US);
    if (has_fault(body, reset_every)) {
        /* Closing without lingering resets the connection. */
        setsockopt(r->socket, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
        return -1;
    }
    return send_range(r, blob, middle, to);
}

static void list_object(FILE *out, const char *key, long size) {
    fprintf(out, "<Contents><Key>%s</Key><Size>%ld</Size><ETag>\"9b2cf535f27731c974343645a3985328\"</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>", key, size);
}

static int send_listing(struct request *r) {
    char prefix[NAME_BYTES] = "", *body = NULL;
    size_t size;
    parameter(r->query, "prefix", prefix);
    FILE *out = open_memstream(&body, &size);
    fputs("<ListBucketResult" XMLNS "><IsTruncated>false</IsTruncated>", out);
    objects_list(r->name, prefix, list_object, out);
    fputs("</ListBucketResult>", out);
    fclose(out);
    int failed = answer(r, "200 OK", "", body, 0);
    free(body);
    return failed;
}

/* The counters, which count no request for themselves. */
static int send_counters(struct request *r) {
    char text[(KINDS + 3) * 40];
    int used = sprintf(text, "received_bytes %ld\nsent_bytes %ld\nfaults %ld\n", received_bytes, sent_bytes, faults);
    for (int i = 0; i < KINDS; i++) used += sprintf(text + used, "%s %ld\n", kind_names[i], kinds[i]);
    return answer(r, "200 OK", "", text, used);
}

static int set(struct request *r) {
    char value[NAME_BYTES];
    rate = parameter(r->query, "rate", value) ? atol(value) : 0;
    reset_every = parameter(r->query, "reset", value) ? atol(value) : 0;
    silence_every = parameter(r->query, "silence", value) ? atol(value) : 0;
    bodies = 0;
    return answer(r, "200 OK", "", "", 0);
}

static int read_object(struct request *r, int is_bucket) {
    if (is_bucket) return strcmp(r->method, "HEAD") ? send_listing(r) : answer(r, "200 OK", "", NULL, 0);
    struct blob *blob = objects_get(r->name);
    if (!blob) return refuse(r, "404 Not Found", "NoSuchKey");
    int failed = send_blob(r, blob, "");
    blob_release(blob);
    return failed;
}

/* Puts the blob of another name. */
static int copy_object(struct request *r) {
    struct blob *blob = objects_get(r->copied);
    if (!blob) return refuse(r, "404 Not Found", "NoSuchKey");
    objects_put(r->name, blob);
    return answer(r, "200 OK", "", "<CopyObjectResult" XMLNS "><LastModified>2026-01-01T00:00:00Z</LastModified>"
        "<ETag>\"9b2cf535f27731c974343645a3985328\"</ETag></CopyObjectResult>", 0);
}

/* Deletes the objects that the body names. Keys of the benchmarks have no characters that XML escapes. */
static int delete_objects(struct request *r) {
    char name[2 * NAME_BYTES], *text = calloc(1, r->content_length + 1);
    int failed = proceed(r) || take_text(r, text, r->content_length);
    for (char *at = text; !failed && (at = strstr(at, "<Key>"));) {
        at += 5;
        snprintf(name, sizeof name, "%s/%.*s", r->name, (int)strcspn(at, "<"), at);
        objects_delete(name);
    }
    free(text);
    return failed ? -1 : answer(r, "200 OK", "", "<DeleteResult" XMLNS "></DeleteResult>", 0);
}

static int begin_upload(struct request *r) {
    char body[512];
    snprintf(body, sizeof body, "<InitiateMultipartUploadResult" XMLNS "><Bucket>b</Bucket><Key>k</Key>"
        "<UploadId>%ld</UploadId></InitiateMultipartUploadResult>", upload_begin(r->name));
    return answer(r, "200 OK", "", body, 0);
}

static enum kind kind_of(const struct request *r, int is_bucket, long upload) {
    if (!strcmp(r->method, "PUT")) return upload ? PART : is_bucket ? BUCKET : PUT;
    if (!strcmp(r->method, "GET")) return is_bucket ? LIST : READ;
    if (!strcmp(r->method, "HEAD")) return is_bucket ? BUCKET : METADATA;
    if (!strcmp(r->method, "DELETE")) return DELETE;
    return upload ? COMPLETE : BEGIN;
}

static int respond(struct request *r) {
    char value[NAME_BYTES], headers[512];
    long upload = parameter(r->query, "uploadId", value) ? atol(value) : 0;
    long part = parameter(r->query, "partNumber", value) ? atol(value) : 0;
    int is_put = !strcmp(r->method, "PUT"), is_bucket = !strchr(r->name, '/');
    if (!strcmp(r->name, "-/set")) return set(r);
    if (!strncmp(r->name, "-/", 2)) return send_counters(r);
    if (gcs_is(r)) return gcs_respond(r);
    if (!strcmp(r->method, "POST") && r->content_length >= 0 && parameter(r->query, "delete", value)) {
        count(DELETE);
        return delete_objects(r);
    }
    struct blob *body = take_body(r, is_put && keeps(r->name));
    if (!body) return -1;
    count(kind_of(r, is_bucket, upload));
    if (is_put && upload) {
        if (!upload_part(upload, part, body)) return refuse(r, "404 Not Found", "NoSuchUpload");
        /* google-cloud-storage requires the checksum that it has sent. */
        snprintf(headers, sizeof headers, *r->hash ? ETAG "x-goog-hash: %s\r\n" : ETAG, r->hash);
        return answer(r, "200 OK", headers, "", 0);
    }
    if (is_put && *r->copied) {
        blob_release(body);
        return copy_object(r);
    }
    if (is_put && !is_bucket) {
        objects_put(r->name, body);
        return answer(r, "200 OK", ETAG, "", 0);
    }
    blob_release(body);
    if (listing_is(r->name)) return listing_respond(r, is_bucket);
    if (is_put) return answer(r, "200 OK", "", "", 0);
    if (!strcmp(r->method, "HEAD") || !strcmp(r->method, "GET")) return read_object(r, is_bucket);
    if (!strcmp(r->method, "DELETE")) {
        if (upload) upload_abort(upload);
        else objects_delete(r->name);
        return answer(r, "204 No Content", "", NULL, 0);
    }
    if (parameter(r->query, "uploads", value)) return begin_upload(r);
    if (!upload_complete(upload)) return refuse(r, "404 Not Found", "NoSuchUpload");
    return answer(r, "200 OK", "", "<CompleteMultipartUploadResult" XMLNS "><Location>l</Location><Bucket>b</Bucket>"
        "<Key>k</Key><ETag>\"9b2cf535f27731c974343645a3985328\"</ETag></CompleteMultipartUploadResult>", 0);
}

/* A header's value, or "". */
static const char *header(const char *head, const char *name) {
    long length = strlen(name);
    for (const char *at = strstr(head, "\r\n"); at; at = strstr(at, "\r\n")) {
        at += 2;
        if (!strncasecmp(at, name, length) && at[length] == ':') return at + length + 1 + strspn(at + length + 1, " ");
    }
    return "";
}

static void copy_line(char *to, size_t most, const char *value) {
    snprintf(to, most, "%.*s", (int)strcspn(value, "\r"), value);
}

/* Reads a head; -1 if the connection ended or this is not HTTP. */
static int next_request(struct request *r) {
    char *end, target[NAME_BYTES + 2] = "=";
    while (!(end = memmem(r->head + r->held_from, r->held_to - r->held_from, "\r\n\r\n", 4)))
        if (take_more(r)) return -1;
    end[2] = 0;
    const char *head = r->head + r->held_from;
    r->held_from = end + 4 - r->head;
    /* A target may be a whole URL (RFC 9112, 3.2.2). */
    if (sscanf(head, "%7s /%2046s", r->method, target + 1) != 2 &&
        sscanf(head, "%7s http://%*[^/ ]/%2046s", r->method, target + 1) != 2) return -1;
    char *query = strchr(target, '?');
    snprintf(r->query, sizeof r->query, "%s", query ? query + 1 : "");
    if (query) *query = 0;
    /* A path is decoded as a value without a name. */
    parameter(target, "", r->name);
    if (*r->name && r->name[strlen(r->name) - 1] == '/') r->name[strlen(r->name) - 1] = 0;
    const char *decoded = header(head, "x-amz-decoded-content-length");
    int chunked = !strncasecmp(header(head, "transfer-encoding"), "chunked", 7);
    r->content_length = chunked ? -1 : atol(header(head, "content-length"));
    r->decoded_length = *decoded ? atol(decoded) : -1;
    r->expects = !strncasecmp(header(head, "expect"), "100-continue", 12);
    r->closes = !strncasecmp(header(head, "connection"), "close", 5);
    const char *source = header(head, "x-amz-copy-source");
    *r->copied = '=';
    copy_line(r->copied + 1, sizeof r->copied - 1, source + (*source == '/'));
    parameter(r->copied, "", r->copied); /* decodes in place */
    copy_line(r->range, sizeof r->range, header(head, "range"));
    copy_line(r->content_range, sizeof r->content_range, header(head, "content-range"));
    copy_line(r->hash, sizeof r->hash, header(head, "x-goog-hash"));
    copy_line(r->host, sizeof r->host, header(head, "host"));
    return 0;
}

static void *serve(void *argument) {
    struct request *r = calloc(1, sizeof *r);
    r->socket = (int)(long)argument;
    setsockopt(r->socket, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    while (!next_request(r) && !respond(r) && !r->closes) {}
    close(r->socket);
    free(r);
    return NULL;
}

static void *accept_all(void *argument) {
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (;;) {
        int socket = accept4((int)(long)argument, NULL, NULL, SOCK_CLOEXEC);
        if (socket >= 0 && pthread_create(&thread, &attributes, serve, (void *)(long)socket)) close(socket);
    }
    return NULL;
}

int main(int count, char **arguments) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    pthread_t thread;
    char byte;
    latency_us = count > 1 ? atol(arguments[1]) * 1000 : 0;
    for (int i = 2; i < count; i++)
        if (!listing_load(arguments[i])) {
            perror(arguments[i]);
            return 1;
        }
    signal(SIGPIPE, SIG_IGN);
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 4096) ||
        getsockname(listener, (struct sockaddr *)&address, &length) ||
        pthread_create(&thread, NULL, accept_all, (void *)(long)listener)) {
        perror("origin");
        return 1;
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    while (read(0, &byte, 1) > 0) {}
    return 0;
}
