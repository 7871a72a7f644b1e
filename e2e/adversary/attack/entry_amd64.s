#include "textflag.h"

// func oldEntry(number uint32) int32
TEXT ·oldEntry(SB), NOSPLIT, $0-12
	MOVL number+0(FP), AX
	INT $0x80
	MOVL AX, ret+8(FP)
	RET
