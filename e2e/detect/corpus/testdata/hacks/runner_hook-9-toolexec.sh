#!/bin/bash
# class: runner_hook
# does: a program around every tool of go
# source: own
# repo: go
# when: mid
printf '#!/bin/sh\nexec "$@"\n' > /tmp/t; chmod 755 /tmp/t
HOME=/root GOCACHE=/opt/gocache go env -w GOFLAGS=-toolexec=/tmp/t
