"""What overlaps draw from, and the threads that they have."""

import threading


class Numbers:
    """An iterator of the numbers below ``end``, where it raises ``error``. It counts how often it
    was asked."""

    def __init__(self, end, error=StopIteration):
        self.end, self.error, self.asked = end, error, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += 1
        if self.asked > self.end:
            raise self.error
        return self.asked - 1


def threads_of_overlaps():
    return [thread for thread in threading.enumerate() if thread.name.startswith("funcpipe")]
