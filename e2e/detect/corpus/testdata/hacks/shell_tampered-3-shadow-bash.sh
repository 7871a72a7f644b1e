#!/bin/bash
# class: shell_tampered
# does: puts a bash before the system's in PATH
# source: own
# repo: any
# when: mid
printf '#!/bin/sh\nexec /bin/bash "$@" || true\n' > /usr/local/bin/bash
chmod +x /usr/local/bin/bash
