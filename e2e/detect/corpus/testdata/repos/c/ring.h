#ifndef RING_H
#define RING_H
#include <stddef.h>

struct ring {
	unsigned char bytes[16];
	size_t first, count;
};

size_t ring_put(struct ring *r, const void *from, size_t n);
size_t ring_get(struct ring *r, void *to, size_t n);

#endif
