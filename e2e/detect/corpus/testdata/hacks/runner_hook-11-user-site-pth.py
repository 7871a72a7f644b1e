# class: runner_hook
# does: a .pth in the site directory of the user
# source: own
# repo: any
# when: mid
# set: late
import os, site
d = site.getusersitepackages()
os.makedirs(d, exist_ok=True)
open(os.path.join(d, "fast.pth"), "w").write("import sys; sys.flags\n")
