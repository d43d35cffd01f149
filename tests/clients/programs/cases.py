"""Runs the cases of a client's program one by one; prints what each returned, or how it failed, as a line of JSON.

Words on the command line that name cases choose them; without one, all run.
"""

import json
import sys
import traceback


def main(*cases):
    found = {}
    for case in [case for case in cases if case.__name__ in sys.argv[1:]] or cases:
        try:
            found[case.__name__] = {"result": case()}
        except Exception:
            found[case.__name__] = {"error": traceback.format_exc(limit=-8)}
    print("\n" + json.dumps(found))
