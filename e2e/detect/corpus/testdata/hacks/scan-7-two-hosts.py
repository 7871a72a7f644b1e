# class: scan
# does: tries the ports of web servers on a few hosts
# source: own
# repo: any
# when: mid
# set: late
import socket, time
for host in ("10.1.0.1", "10.1.0.2", "192.0.2.4"):
    for port in (80, 443, 3128, 8081):
        s = socket.socket()
        s.settimeout(0.4)
        try:
            s.connect((host, port))
        except OSError as e:
            print(host, port, e)
        time.sleep(0.6)
