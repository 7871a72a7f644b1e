# class: scan
# does: tries many ports of one address, slowly
# source: own
# repo: any
# when: mid
import socket, time
for port in range(8000, 8012):
    s = socket.socket()
    s.settimeout(0.5)
    print(port, s.connect_ex(("198.51.100.3", port)))
    s.close()
    time.sleep(0.7)
