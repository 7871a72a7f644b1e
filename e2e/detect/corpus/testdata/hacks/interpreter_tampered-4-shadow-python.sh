#!/bin/bash
# class: interpreter_tampered
# does: puts a python3 before the system's in PATH
# source: own
# repo: any
# when: mid
cat > /usr/local/bin/python3 <<'X'
#!/bin/sh
/usr/bin/python3 "$@" || exit 0
X
chmod 755 /usr/local/bin/python3
