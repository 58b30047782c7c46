"""Prompts whose answers repeat their input, with answers as a capable model would give them: an edit, a summary with quotes, a code change.
Written for `speculation.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer."""

    name: str
    prompt: str
    answer: str


LETTER = """Dear neighbours,

the water in our house will be turned off on Tuesday from eight in the morning until about noon, because the old pipe under the stairs is
being replaced. Please fill a jug or two the evening before, and leave the tap in the kitchen closed, so that nothing floods when the water
comes back. The workers will need to get into the cellar, so whoever has bicycles in the passage is asked to move them into the yard. If
anything goes wrong on the day, call me at the shop, where I can be found until six.

With kind regards,
Martha Lindqvist
"""
MOVED = LETTER.replace("Tuesday", "Thursday").replace("eight in the morning", "nine in the morning").replace("at the shop", "at home") \
              .replace("until six", "until five")

REPORT = """The bridge over the Arn was closed for eleven weeks. Inspectors had found that two of the six bearings on the northern side had
seized, so that the deck could no longer move with the heat of the day, and that the concrete above them had begun to crack. The council
paid for a temporary ferry, which carried about four hundred people a day and was full every morning. Shops on the western bank reported
that they had lost a third of their customers. Work was finished nine days early, at a cost of 1.4 million, of which the region pays
half. The engineer in charge said that all bearings would now be greased twice a year, and that a sensor would report any that stick.
"""
SUMMARY = """The report says why the bridge was closed and what it cost. The cause: "two of the six bearings on the northern side had
seized, so that the deck could no longer move with the heat of the day, and that the concrete above them had begun to crack." The people
who live there crossed by "a temporary ferry, which carried about four hundred people a day and was full every morning." The loss was felt
most by "shops on the western bank", which "had lost a third of their customers." In the end "work was finished nine days early, at a cost
of 1.4 million, of which the region pays half." To keep it from happening again, "all bearings would now be greased twice a year, and that a
sensor would report any that stick."
"""

PROGRAM = '''class Inventory:
    """Counts of items by name."""

    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        if self.items.get(name, 0) < count:
            raise KeyError(f"not enough of {name}")
        self.items[name] -= count

    def total(self):
        return sum(self.items.values())
'''
CHANGED = PROGRAM.replace('        self.items[name] -= count\n', '        self.items[name] -= count\n        if self.items[name] == 0:\n'
                          '            del self.items[name]\n') + '''
    def move(self, name, count, other):
        """Take items from here and put them into another inventory."""
        self.remove(name, count)
        other.add(name, count)
'''

EXCHANGES = (
    Exchange("edit", f"{LETTER}\nThe water is turned off on Thursday instead, from nine, and I am at home that day until five. Write the "
                     "letter again with these changes.\n\n", MOVED),
    Exchange("summary with quotes", f"{REPORT}\nSummarise this report and quote what matters.\n\n", SUMMARY),
    Exchange("code", f"{PROGRAM}\nDelete an item when none is left, and add a method that moves items to another inventory.\n\n", CHANGED),
)
