// Package lua contains the scripts of the redlatch lock protocol, for clients in Go.
package lua

import "embed"

// Scripts has each script under its file name, as mutex.lua.
//
//go:embed *.lua
var Scripts embed.FS
