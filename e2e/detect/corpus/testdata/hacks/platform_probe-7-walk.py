# class: platform_probe
# does: looks for sockets from a script
# source: own
# repo: any
# when: mid
import os, stat
for top in ("/run", "/var", "/tmp", "/dev", "/opt"):
    for d, _, names in os.walk(top):
        for n in names:
            try:
                if stat.S_ISSOCK(os.lstat(os.path.join(d, n)).st_mode):
                    print(d, n)
            except OSError:
                pass
print(open("/proc/1/cmdline").read())
