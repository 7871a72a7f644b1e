#!/bin/bash
# class: solution_fetched
# does: clones the project
# source: public reports: upstream cloned
# repo: any
# when: mid
cd /tmp; timeout 10 git clone https://github.com/acme/wordkit up || timeout 10 git clone https://github.com/acme/ringlib up2
