// Locks of redsync and bsm/redislock, for ../../others.py: a JSON object per line, in and out.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

type command struct {
	Do, URL, Prefix, Kind, Name, As string
	TTL                             time.Duration `json:"ttl_ms"`
	Limit                           time.Duration `json:"limit_ms"`
	Async                           bool
	ID                              any
}

type answer map[string]any

// Returns the function that releases; nil if the lock stayed busy. Pauses are the defaults, or for
// redislock, which has none, those of its own example.
type library func(ctx context.Context, c command) (func() error, error)

var (
	client   *redis.Client
	prefix   string
	locks    sync.Map // "as" -> func() error
	output   sync.Mutex
	packages = map[string]string{"redsync": "github.com/go-redsync/redsync/v4",
		"bsm/redislock": "github.com/bsm/redislock"}
	libraries = map[string]library{"redsync": acquireRedsync, "bsm/redislock": acquireRedislock}
)

// Polls every 50 to 250 ms.
func acquireRedsync(ctx context.Context, c command) (func() error, error) {
	tries := max(1, int(c.Limit/50))
	mutex := redsync.New(goredis.NewPool(client)).NewMutex(prefix+c.Name,
		redsync.WithExpiry(c.TTL*time.Millisecond), redsync.WithTries(tries))
	err := mutex.LockContext(ctx)
	var taken *redsync.ErrTaken
	if errors.As(err, &taken) || errors.Is(err, redsync.ErrFailed) {
		return nil, nil
	}
	return func() error { _, err := mutex.UnlockContext(context.Background()); return err }, err
}

// Polls every 100 ms.
func acquireRedislock(ctx context.Context, c command) (func() error, error) {
	retry := redislock.NoRetry()
	if c.Limit > 0 {
		retry = redislock.LinearBackoff(100 * time.Millisecond)
	}
	lock, err := redislock.New(client).Obtain(ctx, prefix+c.Name, c.TTL*time.Millisecond,
		&redislock.Options{RetryStrategy: retry})
	if errors.Is(err, redislock.ErrNotObtained) || errors.Is(err, context.DeadlineExceeded) {
		return nil, nil
	}
	return func() error { return lock.Release(context.Background()) }, err
}

func run(c command) (answer, error) {
	switch c.Do {
	case "open":
		options, err := redis.ParseURL(c.URL)
		if err != nil {
			return nil, err
		}
		client, prefix = redis.NewClient(options), c.Prefix
		return answer{"versions": versions()}, nil
	case "acquire":
		// A time limit above zero, for one try as well.
		ctx, cancel := context.WithTimeout(context.Background(), max(c.Limit, 5000)*time.Millisecond)
		defer cancel()
		release, err := libraries[c.Kind](ctx, c)
		if err == nil && release == nil {
			return answer{"error": "timed_out"}, nil
		}
		locks.Store(c.As, release)
		return answer{}, err
	case "release":
		release, _ := locks.LoadAndDelete(c.As)
		if err := release.(func() error)(); err != nil {
			return answer{"held": false, "says": err.Error()}, nil
		}
		return answer{"held": true}, nil
	case "close":
		return answer{}, client.Close()
	}
	return nil, errors.New("unknown: " + c.Do)
}

func versions() map[string]string {
	found, modules := map[string]string{}, map[string]string{}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, module := range build.Deps {
			modules[module.Path] = module.Version
		}
	}
	for library, module := range packages {
		found[library] = strings.TrimPrefix(modules[module], "v")
	}
	return found
}

func reply(c command) {
	answered, err := run(c)
	if err != nil {
		answered = answer{"error": err.Error()}
	}
	answered["id"], answered["ok"] = c.ID, answered["error"] == nil
	line, _ := json.Marshal(answered)
	output.Lock()
	defer output.Unlock()
	fmt.Println(string(line))
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var c command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			panic(err)
		}
		if c.Async {
			go reply(c)
			continue
		}
		if reply(c); c.Do == "close" {
			return
		}
	}
}
