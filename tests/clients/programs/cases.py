"""Runs the cases of a client's program one by one; prints what each returned, or how it failed, as a line of JSON."""

import json
import traceback


def main(*cases):
    found = {}
    for case in cases:
        try:
            found[case.__name__] = {"result": case()}
        except Exception:
            found[case.__name__] = {"error": traceback.format_exc(limit=-8)}
    print("\n" + json.dumps(found))
