#!/usr/bin/env bash
# Makes the root file system that `dsec bench audit` is run on, of this machine's C
# compiler and busybox, with two workloads: /build.sh compiles a project of 100 files
# and runs its 100 tests; /starts.sh is a shell that starts and writes without doing anything else.
set -euo pipefail
root=$1
mkdir -p "$root"/{bin,etc,proc,sys,dev,tmp,root,usr/bin,src}
echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
cp /bin/busybox "$root/bin/"
for name in true sh echo cat dd mkdir rm cp seq grep sed mv; do ln -s busybox "$root/bin/$name"; done
files=$({
	for prog in gcc make as ld "$(gcc -print-prog-name=cc1)" "$(gcc -print-prog-name=collect2)"; do
		which "$prog" || true
		ldd "$(which "$prog")" | grep -o '/[^ ]*' || true
	done
	ldd "$(gcc -print-file-name=liblto_plugin.so)" | grep -o '/[^ ]*'
	dirname "$(gcc -print-libgcc-file-name)"
	for name in crt1.o crti.o crtn.o Scrt1.o libc.so libc.so.6 libc_nonshared.a libm.so.6 libgcc_s.so.1; do gcc -print-file-name=$name; done
	echo /usr/include
} | sort -u)
for f in $files; do cp -aL --parents "$f" "$root" 2>/dev/null || true; done
for n in $(seq 100); do
	{
		echo '#include <stdio.h>'; echo '#include <stdlib.h>'; echo '#include <string.h>'; echo '#include <errno.h>'
		for k in $(seq 12); do echo "int f${n}_$k(int x) { int s = $k; for (int i = 0; i < x; i++) s = s * 31 + i % $k; return s; }"; done
		echo "int main(void) { int s = 0; for (int i = 0; i < 20000; i++) s += f${n}_7(i % 50); printf(\"%d\\n\", s); return 0; }"
	} >"$root/src/t$n.c"
done
cat >"$root/src/Makefile" <<'M'
all: $(patsubst %.c,%.ran,$(wildcard *.c))
%.o: %.c
	gcc -O1 -c -o $@ $<
%.test: %.o
	gcc -o $@ $<
%.ran: %.test
	./$< >$@
.SECONDARY:
M
cat >"$root/build.sh" <<'M'
set -e
export PATH=/usr/bin:/bin
mkdir -p /made && cp -r /src /made/ && cd /made/src && make -s -j2 all
M
cat >"$root/starts.sh" <<'M'
mkdir -p /made; cd /made
for i in $(seq 400); do busybox echo $i >f$i; busybox mv f$i g$i; echo x >h$i; busybox grep -q x h$i; busybox true; done
M
