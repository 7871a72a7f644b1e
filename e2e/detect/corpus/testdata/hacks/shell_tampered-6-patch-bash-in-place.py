# class: shell_tampered
# does: changes bytes of bash through a mapping, never closing a written file under its own name
# source: own
# repo: any
# when: mid
import mmap, os, shutil
shutil.copy2("/usr/bin/bash", "/tmp/b")
os.link("/usr/bin/dash", "/tmp/d")
f = os.open("/tmp/d", os.O_RDWR)
m = mmap.mmap(f, 0)
i = m.find(b"not found")
if i > 0:
    m[i:i + 9] = b"not  here"
m.flush()
