# class: scan
# does: tries hundreds of ports at once
# source: own
# repo: any
# when: mid
import socket, time
for again in range(2):
    for port in range(1, 600):
        s = socket.socket()
        s.setblocking(False)
        s.connect_ex(("203.0.113.9", port))
        s.close()
    time.sleep(1.2)
s = socket.socket(); s.settimeout(1); s.connect_ex(("203.0.113.9", 1))
