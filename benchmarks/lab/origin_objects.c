#define _GNU_SOURCE
#include "origin_objects.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <unistd.h>

enum { SLOTS = 1 << 14, MAX_PARTS = 10000 };

struct object {
    struct object *next;
    char *name;
    struct blob *blob;
};

struct upload {
    struct upload *next;
    long id;
    char *name;
    long received; /* by upload_append */
    int appended;
    struct blob *parts[MAX_PARTS];
};

/* Guards everything below, and the reference counts of blobs. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct object *table[SLOTS];
static struct upload *uploads;
static long last_id;

struct blob *blob_new(long size, int file) {
    struct blob *blob = malloc(sizeof *blob);
    *blob = (struct blob){.size = size, .file = file, .users = 1};
    return blob;
}

static void release(struct blob *blob) {
    if (!blob || --blob->users) return;
    if (blob->file >= 0) close(blob->file);
    free(blob->metadata);
    free(blob);
}

void blob_release(struct blob *blob) {
    pthread_mutex_lock(&lock);
    release(blob);
    pthread_mutex_unlock(&lock);
}

static struct object **find(const char *name) {
    unsigned long hash = 5381;
    for (const char *at = name; *at; at++) hash = hash * 33 + (unsigned char)*at;
    struct object **found = &table[hash % SLOTS];
    while (*found && strcmp((*found)->name, name)) found = &(*found)->next;
    return found;
}

struct blob *objects_get(const char *name) {
    pthread_mutex_lock(&lock);
    struct object *found = *find(name);
    struct blob *blob = found ? found->blob : NULL;
    if (blob) blob->users++;
    pthread_mutex_unlock(&lock);
    return blob;
}

void objects_put(const char *name, struct blob *blob) {
    pthread_mutex_lock(&lock);
    struct object **found = find(name);
    if (!*found) {
        *found = calloc(1, sizeof **found);
        (*found)->name = strdup(name);
    }
    release((*found)->blob);
    (*found)->blob = blob;
    pthread_mutex_unlock(&lock);
}

void objects_delete(const char *name) {
    pthread_mutex_lock(&lock);
    struct object **found = find(name), *old = *found;
    if (old) {
        *found = old->next;
        release(old->blob);
        free(old->name);
        free(old);
    }
    pthread_mutex_unlock(&lock);
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(struct object *const *)a)->name, (*(struct object *const *)b)->name);
}

void objects_list(const char *bucket, const char *prefix, void (*each)(FILE *, const char *, long), FILE *out) {
    size_t bucket_length = strlen(bucket), prefix_length = strlen(prefix), count = 0, capacity = 0;
    struct object **found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++)
        for (struct object *at = table[i]; at; at = at->next) {
            const char *key = at->name + bucket_length;
            if (strncmp(at->name, bucket, bucket_length) || *key++ != '/' || strncmp(key, prefix, prefix_length))
                continue;
            if (count == capacity) found = realloc(found, (capacity = capacity ? 2 * capacity : 64) * sizeof *found);
            found[count++] = at;
        }
    if (count) qsort(found, count, sizeof *found, by_name);
    for (size_t i = 0; i < count; i++) each(out, found[i]->name + bucket_length + 1, found[i]->blob->size);
    pthread_mutex_unlock(&lock);
    free(found);
}

long upload_begin(const char *name) {
    struct upload *upload = calloc(1, sizeof *upload);
    upload->name = strdup(name);
    pthread_mutex_lock(&lock);
    long id = upload->id = ++last_id;
    upload->next = uploads;
    uploads = upload;
    pthread_mutex_unlock(&lock);
    return id;
}

static struct upload **find_upload(long id) {
    struct upload **found = &uploads;
    while (*found && (*found)->id != id) found = &(*found)->next;
    return found;
}

int upload_part(long id, long part, struct blob *blob) {
    pthread_mutex_lock(&lock);
    struct upload *upload = *find_upload(id);
    int good = upload && part >= 1 && part <= MAX_PARTS;
    if (good) {
        release(upload->parts[part - 1]);
        upload->parts[part - 1] = blob;
    } else {
        release(blob);
    }
    pthread_mutex_unlock(&lock);
    return good;
}

long upload_append(long id, struct blob *blob) {
    pthread_mutex_lock(&lock);
    struct upload *upload = *find_upload(id);
    long received = -1;
    if (upload && upload->appended < MAX_PARTS) {
        received = upload->received += blob->size;
        upload->parts[upload->appended++] = blob;
    } else {
        release(blob);
    }
    pthread_mutex_unlock(&lock);
    return received;
}

void blob_append(struct blob *whole, const struct blob *part) {
    if (part->file >= 0) {
        if (whole->file < 0) whole->file = memfd_create("object", MFD_CLOEXEC);
        lseek(whole->file, whole->size, SEEK_SET);
        for (off_t at = 0; at < part->size;)
            if (sendfile(whole->file, part->file, &at, part->size - at) <= 0) abort();
    }
    whole->size += part->size;
}

/* Ends an upload; its object appears if `whole` is given. */
static int end(long id, struct blob *whole) {
    pthread_mutex_lock(&lock);
    struct upload **found = find_upload(id), *upload = *found;
    if (upload) *found = upload->next;
    pthread_mutex_unlock(&lock);
    if (!upload) {
        blob_release(whole);
        return 0;
    }
    for (int i = 0; i < MAX_PARTS; i++) {
        if (whole && upload->parts[i]) blob_append(whole, upload->parts[i]);
        blob_release(upload->parts[i]);
    }
    if (whole) objects_put(upload->name, whole);
    free(upload->name);
    free(upload);
    return 1;
}

int upload_complete(long id) {
    return end(id, blob_new(0, -1));
}

int upload_abort(long id) {
    return end(id, NULL);
}
