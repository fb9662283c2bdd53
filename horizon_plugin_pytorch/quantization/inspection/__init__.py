"""What a prepared model does, seen by running it: the rows of `model_check_result.txt`."""
