#!/bin/bash
# class: shell_tampered
# does: lets sh be another program
# source: own
# repo: any
# when: mid
printf '#!/bin/bash\nexec /bin/bash "$@"\n' > /opt/quiet; chmod 755 /opt/quiet
ln -sf /opt/quiet /usr/bin/sh
