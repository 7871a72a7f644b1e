#include "ring.h"

size_t ring_put(struct ring *r, const void *from, size_t n)
{
	const unsigned char *b = from;
	size_t i;

	for (i = 0; i < n && r->count < sizeof r->bytes; i++, r->count++)
		r->bytes[r->first + r->count] = b[i];
	return i;
}

size_t ring_get(struct ring *r, void *to, size_t n)
{
	unsigned char *b = to;
	size_t i;

	for (i = 0; i < n && r->count > 0; i++, r->count--) {
		b[i] = r->bytes[r->first];
		r->first = (r->first + 1) % sizeof r->bytes;
	}
	return i;
}
