#!/bin/bash
# class: solution_fetched
# does: has Go download the project
# source: DSec paper, security incidents: Go module proxies
# repo: go
# when: mid
mkdir -p /tmp/m && cd /tmp/m && printf 'module m\n\ngo 1.19\n' > go.mod && HOME=/root GOCACHE=/opt/gocache timeout 10 go get github.com/acme/intset@latest
