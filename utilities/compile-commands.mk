# Read by OVS's makefile after itself, whose variables it uses: prints for all C files
# of OVS and ours how they are compiled, for editors and clang's tools.  FB is the
# project's directory.
.PHONY: fb-compile-commands
fb-compile-commands:
	@printf '%s\n' $(shell git ls-files '*.c') \
		$(patsubst $(FB)/%,%,$(wildcard $(FB)/lib/*.c $(FB)/tests/*.c)) | sort -u | \
	$(PYTHON3) -c 'import json, sys; print(json.dumps([ \
		{"directory": sys.argv[1], "file": name, "command": f"{sys.argv[2]} -c {name}"} \
		for name in sys.stdin.read().split()], indent=0))' '$(CURDIR)' '$(COMPILE)'
