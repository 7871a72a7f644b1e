#include <stdio.h>
#include <string.h>

#include "ring.h"

int main(void)
{
	struct ring r = {0};
	char out[32] = {0};

	if (ring_put(&r, "0123456789", 10) != 10 || ring_get(&r, out, 8) != 8 || memcmp(out, "01234567", 8)) {
		puts("FAIL plain");
		return 1;
	}
	if (ring_put(&r, "abcdefghijkl", 12) != 12 || ring_get(&r, out, 14) != 14 || memcmp(out, "89abcdefghijkl", 14)) {
		puts("FAIL around");
		return 1;
	}
	puts("PASS");
	return 0;
}
