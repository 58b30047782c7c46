"""A model's weights in a run, wherever they lie: records for the ops, parts that stream, experts, layers of a card."""
