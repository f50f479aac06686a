"""The whole job in one command: demo, doctor, predictions."""
