"""The fixed text that fidelity is measured on: prose, a dialogue, numbers, code and other scripts. Written for this."""

TEXT = """The harbour wakes before the town does. By four the first boats are out past the mole, their lamps small and
yellow on the water, and the ice house has begun to rattle. Nobody speaks much. Ropes are coiled, crates are counted,
and the man who keeps the ledger writes the date at the top of a new page: 14 March, wind from the south-west, 6 knots.

"How many did you bring in yesterday?" asked the inspector.
"Three hundred and twelve, if you count the small ones. You always count the small ones."
"I count what is on the scale. That makes 287.5 kilograms, and the limit is 300."

A lighthouse does not move, and still it tells every ship where it is. Its keeper explained the trick to the children:
each tower has a rhythm of its own. Two short flashes and a long one mean this rock; one long flash every ten seconds
means the next. A captain who knows the table needs no name and no map, only a clock and a little patience.

def mean(values):
    \"\"\"The arithmetic mean; an empty list has none.\"\"\"
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

for size in (1, 10, 100):
    print(f"{size:>4}: {mean(list(range(size))):.2f}")

Water boils at 100 degrees Celsius at sea level, and at about 93 degrees on a mountain of 2,000 metres, because the air
above it weighs less. That is why beans take longer to cook up there, and why a recipe is never quite true everywhere.

Der Zug nach Norden fährt um 17:42 Uhr von Gleis 9. La mer est calme ce soir. Mañana lloverá en la costa. Καλημέρα.

1. Open the valve a quarter turn. 2. Wait until the needle stands at 2.4 bar. 3. Close it again, and note the time.
"""
