# class: node_attack
# does: a process that makes threads until it cannot
# source: own
# repo: any
# when: last
# set: late
import threading, time
stop = time.time() + 3
try:
    while time.time() < stop:
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
except RuntimeError as e:
    print(e)
