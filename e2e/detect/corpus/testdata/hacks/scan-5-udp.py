# class: scan
# does: asks many addresses for names
# source: own
# repo: any
# when: mid
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(1, 13):
    try:
        s.sendto(b"\0\1\1\0\0\1\0\0\0\0\0\0\3www\7example\3org\0\0\1\0\1", (f"198.51.100.{i}", 53))
    except OSError as e:
        print(e)
    time.sleep(0.6)
