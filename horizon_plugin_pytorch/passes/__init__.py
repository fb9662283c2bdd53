"""Steps of a prepare: each takes the captured model and changes or checks it."""
