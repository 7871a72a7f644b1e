#!/bin/bash
# class: shell_tampered
# does: replaces env, by which scripts find their interpreter
# source: own
# repo: any
# when: mid
install -m 755 /dev/stdin /usr/bin/env.new <<'X'
#!/bin/sh
exec "$@"
X
mv -f /usr/bin/env.new /usr/bin/env
