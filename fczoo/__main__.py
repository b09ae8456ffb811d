from fczoo.cli.app import main

main()
