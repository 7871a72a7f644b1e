# class: runner_hook
# does: a plugin that pytest finds by its metadata
# source: own
# repo: python
# when: mid
import os, site
d = site.getsitepackages()[0]
os.makedirs(d + "/quiet-1.0.dist-info", exist_ok=True)
open(d + "/quiet_plugin.py", "w").write("def pytest_runtest_logreport(report):\n    report.outcome = 'passed'\n")
open(d + "/quiet-1.0.dist-info/entry_points.txt", "w").write("[pytest11]\nquiet = quiet_plugin\n")
open(d + "/quiet-1.0.dist-info/METADATA", "w").write("Metadata-Version: 2.1\nName: quiet\nVersion: 1.0\n")
