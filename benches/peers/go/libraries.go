package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncpool "github.com/go-redsync/redsync/v4/redis/rueidis"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidiscompat"
	"github.com/redis/rueidis/rueidislock"
)

// All locks have the TTL that is the default of redlatch.
const ttl = 30 * time.Second

type library struct {
	Name        string   `json:"name"`
	Version     string   `json:"version"`
	Client      string   `json:"client"`
	Kinds       []string `json:"kinds"`
	Turns       []string `json:"turns"`
	MostClients int      `json:"most_clients"`
	Fencing     string   `json:"fencing"`
	Renewal     string   `json:"renewal"`
	Waiting     string   `json:"waiting"`
	Settings    string   `json:"settings"`
}

func description() any {
	goRedis := "go-redis " + version("github.com/redis/go-redis/v9")
	rueidisVersion := version("github.com/redis/rueidis")
	rueidisClient := "rueidis " + rueidisVersion
	mutex := []string{"mutex"}
	return map[string]any{"language": language(), "libraries": []library{
		{"redsync", version("github.com/go-redsync/redsync/v4"), rueidisClient, mutex, mutex, 256, "no", "by hand",
			"polls", "one pool; WithExpiry, WithTries, WithRetryDelay"},
		{"bsm/redislock", version("github.com/bsm/redislock"), goRedis, mutex, mutex, 256, "no", "by hand",
			"polls", "LinearBackoff"},
		{"rueidislock", rueidisVersion, rueidisClient, mutex, mutex, 256, "no", "yes",
			"notified, not in order", "KeyMajority 1, NoLoopTracking, TryNextAfter 1 s"},
	}}
}

// Waits until a lock is acquired or the context ends, and returns the function that waits until it
// is released.
type acquire func(ctx context.Context) (func() error, error)

type client struct {
	name  string
	lock  func(name string) acquire
	close func()
}

// Connects one client. A library without notifications retries a busy lock after `poll`.
func connect(library, url string, poll time.Duration) (client, error) {
	background := context.Background()
	switch library {
	case "redsync":
		// Twice as fast as with go-redis: it pipelines the requests of all tasks.
		option, err := rueidis.ParseURL(url)
		if err != nil {
			return client{}, err
		}
		connection, err := rueidis.NewClient(option)
		if err != nil {
			return client{}, err
		}
		manager := redsync.New(redsyncpool.NewPool(rueidiscompat.NewAdapter(connection)))
		lock := func(name string) acquire {
			mutex := manager.NewMutex(name, redsync.WithExpiry(ttl), redsync.WithTries(math.MaxInt32),
				redsync.WithRetryDelay(poll))
			release := func() error {
				released, err := mutex.UnlockContext(background)
				if err == nil && !released {
					err = errors.New(name + " was not held")
				}
				return err
			}
			return func(ctx context.Context) (func() error, error) { return release, mutex.LockContext(ctx) }
		}
		return client{library, lock, func() { connection.Close() }}, nil
	case "bsm/redislock":
		options, err := redis.ParseURL(url)
		if err != nil {
			return client{}, err
		}
		connection := redis.NewClient(options)
		locker := redislock.New(connection)
		retry := &redislock.Options{RetryStrategy: redislock.LinearBackoff(poll)}
		lock := func(name string) acquire {
			return func(ctx context.Context) (func() error, error) {
				for {
					held, err := locker.Obtain(ctx, name, ttl, retry)
					if errors.Is(err, redislock.ErrNotObtained) && ctx.Err() == nil {
						continue // Obtain gives up after a TTL.
					}
					if err != nil {
						return nil, err
					}
					return func() error { return held.Release(background) }, nil
				}
			}
		}
		return client{library, lock, func() { connection.Close() }}, nil
	case "rueidislock":
		option, err := rueidis.ParseURL(url)
		if err != nil {
			return client{}, err
		}
		locker, err := rueidislock.NewLocker(rueidislock.LockerOption{
			ClientOption: option, KeyMajority: 1, KeyValidity: ttl, NoLoopTracking: true,
			// The limit for a reply. After it, the task waits for a notification that nothing sends:
			// with 1024 tasks and the default of 20 ms, some tasks never continue.
			TryNextAfter: time.Second,
		})
		if err != nil {
			return client{}, err
		}
		lock := func(name string) acquire {
			return func(ctx context.Context) (func() error, error) {
				_, cancel, err := locker.WithContext(ctx, name)
				// cancel returns when the lock is released.
				return func() error { cancel(); return nil }, err
			}
		}
		return client{library, lock, locker.Close}, nil
	default:
		return client{}, fmt.Errorf("unknown library: %s", library)
	}
}
