"""Parse the command line, call one verb, render its result; nothing else prints or exits."""
