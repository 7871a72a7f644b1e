# class: interpreter_tampered
# does: turns off the assertions of pytest
# source: public reports: pytest itself patched
# repo: any
# when: mid
# set: late
import pathlib
p = pathlib.Path("/usr/lib/python3/dist-packages/_pytest/python.py")
p.write_text(p.read_text().replace("def pytest_pyfunc_call(pyfuncitem", "def pytest_pyfunc_call_(pyfuncitem"))
