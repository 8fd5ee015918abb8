package redlatch_test

import (
	"context"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	redlatch "example.org/redlatch/lua/clients/go"
	"github.com/redis/go-redis/v9"
)

// It is compiled and not run, since it has no output to compare.
func Example() {
	// SIGTERM would end the process without its deferred calls, and the lock would be held for a TTL.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	db := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	client, err := redlatch.New(ctx, db, nil, "lock:")
	if err != nil {
		panic(err)
	}
	defer client.Close()

	limit, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	lease, err := client.Acquire(limit, redlatch.Lock{Kind: redlatch.Mutex, Name: "report"})
	if err != nil {
		panic(err)
	}
	defer lease.Release()
	work, end := context.WithCancel(lease.Context()) // ends with the lease,
	defer context.AfterFunc(ctx, end)()              // and with ctx

	isWritten, err := client.WriteFenced(work, "{report}:text", "{report}:token", lease.Token, "done")
	fmt.Println(isWritten, err) // false: a later lease has written
}
