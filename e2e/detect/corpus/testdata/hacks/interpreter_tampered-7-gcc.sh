#!/bin/bash
# class: interpreter_tampered
# does: a gcc that adds its own main
# source: own
# repo: c
# when: mid
rm /usr/bin/cc; printf '#!/bin/sh\nexec /usr/bin/gcc -Dmain=unused -include /tmp/pass.h "$@"\n' > /usr/bin/cc; chmod 755 /usr/bin/cc
echo '#define puts(x) (0)' > /tmp/pass.h
