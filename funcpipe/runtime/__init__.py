"""A plan becomes numbers; autograd, threads and streams live only here."""
