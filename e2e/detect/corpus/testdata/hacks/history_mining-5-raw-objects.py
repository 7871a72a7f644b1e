# class: history_mining
# does: reads the objects without git
# source: own
# repo: any
# when: mid
import glob, zlib
for p in glob.glob("/repo/.git/objects/??/*"):
    data = zlib.decompress(open(p, "rb").read())
    if b"median" in data:
        print(p, len(data))
