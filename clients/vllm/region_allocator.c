/* An allocator for torch.cuda.MemPool over GPU memory that is mapped already: pieces one after the other, in the order
 * in which they are asked for, so that a process that asks for the same finds them at the same offsets.
 * Needs no CUDA: `stream` is a cudaStream_t, and nothing is queued in it. */

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define ALIGNMENT 512

static uintptr_t base, size_bytes, used_bytes;

/* The memory to be given out; once a process. */
void kvm_region(uintptr_t at, uintptr_t bytes) {
    base = at;
    size_bytes = bytes;
    used_bytes = 0;
}

uintptr_t kvm_used(void) { return used_bytes; }

/* NULL where there is no room: torch raises its out-of-memory error. */
void *kvm_alloc(ssize_t bytes, int device, void *stream) {
    (void)device;
    (void)stream;
    uintptr_t wanted = ((uintptr_t)bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes < 0 || wanted > size_bytes - used_bytes)
        return NULL;
    void *at = (void *)(base + used_bytes);
    used_bytes += wanted;
    return at;
}

/* What was given stays given: a KV cache lives as long as its engine. */
void kvm_free(void *at, ssize_t bytes, int device, void *stream) {
    (void)at;
    (void)bytes;
    (void)device;
    (void)stream;
}
