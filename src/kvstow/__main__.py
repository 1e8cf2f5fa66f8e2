from kvstow.cli import main

main()
