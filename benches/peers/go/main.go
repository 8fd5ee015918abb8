// Measures redsync, bsm/redislock and rueidislock, as ../README.md describes.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Pairs is the result of `pairs`.
type Pairs struct {
	Seconds  float64 `json:"seconds"`
	Pairs    int64   `json:"pairs"`
	Overlaps int64   `json:"overlaps"`
}

// Turns is the result of `turns`.
type Turns struct {
	Seconds      float64 `json:"seconds"`
	Acquisitions int64   `json:"acquisitions"`
	Turns        int64   `json:"turns"`
	Fewest       int64   `json:"fewest"`
	Most         int64   `json:"most"`
	Overlaps     int64   `json:"overlaps"`
}

func main() {
	if err := serve(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve() error {
	if len(os.Args) != 2 {
		return errors.New("usage: peer redis://HOST:PORT/")
	}
	url, commands := os.Args[1], bufio.NewScanner(os.Stdin)
	for commands.Scan() {
		words := strings.Fields(commands.Text())
		switch {
		case len(words) == 1 && words[0] == "libraries":
			print(description())
		case len(words) == 5 && words[0] == "pairs":
			size, span, err := numbers(words[3], words[4])
			if err != nil {
				return err
			}
			result, err := pairs(url, words[1], size, span, commands)
			if err != nil {
				return err
			}
			print(result)
		case len(words) == 6 && words[0] == "turns":
			size, span, err := numbers(words[3], words[4])
			if err != nil {
				return err
			}
			poll, err := strconv.Atoi(words[5])
			if err != nil {
				return err
			}
			result, err := turns(url, words[1], size, span, time.Duration(poll)*time.Millisecond, commands)
			if err != nil {
				return err
			}
			print(result)
		default:
			return fmt.Errorf("unknown command: %s", commands.Text())
		}
	}
	return commands.Err()
}

func numbers(size, seconds string) (int, time.Duration, error) {
	count, err := strconv.Atoi(size)
	if err != nil {
		return 0, 0, err
	}
	span, err := strconv.ParseFloat(seconds, 64)
	return count, time.Duration(span * float64(time.Second)), err
}

func print(value any) {
	line, _ := json.Marshal(value)
	fmt.Println(string(line))
}

// Reports that the measurement is prepared, and waits for the line `go`.
func wait(commands *bufio.Scanner) error {
	print(map[string]bool{"ready": true})
	if !commands.Scan() || commands.Text() != "go" {
		return errors.New("no line go")
	}
	return nil
}

// The version of a module that this program was built with.
func version(module string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dependency := range info.Deps {
			if dependency.Path == module {
				return strings.TrimPrefix(dependency.Version, "v")
			}
		}
	}
	return "unknown"
}

func language() string {
	return "Go " + strings.TrimPrefix(runtime.Version(), "go")
}

// Uncontended locks: tasks of one client, each with a lock name of its own.
func pairs(url, library string, tasks int, span time.Duration, commands *bufio.Scanner) (Pairs, error) {
	client, err := connect(library, url, 100*time.Millisecond)
	if err != nil {
		return Pairs{}, err
	}
	defer client.close()
	if _, err := runPairs(client, tasks, span/5); err != nil {
		return Pairs{}, err
	}
	if err := wait(commands); err != nil {
		return Pairs{}, err
	}
	return runPairs(client, tasks, span)
}

func runPairs(client client, tasks int, span time.Duration) (Pairs, error) {
	var done sync.WaitGroup
	var total, overlaps atomic.Int64
	failures := make(chan error, tasks)
	start := time.Now()
	for task := range tasks {
		done.Add(1)
		go func() {
			defer done.Done()
			acquire := client.lock(fmt.Sprintf("%s:own:%d", client.name, task))
			var held atomic.Bool
			for count := 0; count == 0 || time.Since(start) < span; count++ {
				release, err := acquire(context.Background())
				if err != nil {
					failures <- err
					return
				}
				if held.Swap(true) {
					overlaps.Add(1)
				}
				held.Store(false)
				if err := release(); err != nil {
					failures <- err
					return
				}
				total.Add(1)
			}
		}()
	}
	done.Wait()
	seconds := time.Since(start).Seconds()
	select {
	case err := <-failures:
		return Pairs{}, err
	default:
		return Pairs{Seconds: seconds, Pairs: total.Load(), Overlaps: overlaps.Load()}, nil
	}
}

// Clients that contend for one lock name. A turn is an acquisition by another client than the one
// before.
func turns(url, library string, clients int, span, poll time.Duration, commands *bufio.Scanner) (Turns, error) {
	var done sync.WaitGroup
	var stop, held atomic.Bool
	var last, acquisitions, overlaps atomic.Int64
	last.Store(-1)
	counts := make([]atomic.Int64, clients)
	failures := make(chan error, clients)
	// At the end, waiting clients give up: a waiter of rueidislock may have missed the notification.
	waiting, cancel := context.WithCancel(context.Background())
	defer cancel()
	for number := range clients {
		client, err := connect(library, url, poll)
		if err != nil {
			return Turns{}, err
		}
		defer client.close()
		done.Add(1)
		go func() {
			defer done.Done()
			acquire := client.lock(client.name + ":contended")
			for !stop.Load() {
				release, err := acquire(waiting)
				if stop.Load() && err != nil {
					return
				}
				if err != nil {
					failures <- err
					return
				}
				if held.Swap(true) {
					overlaps.Add(1)
				}
				acquisitions.Add(1)
				if last.Swap(int64(number)) != int64(number) {
					counts[number].Add(1)
				}
				held.Store(false)
				if err := release(); err != nil {
					failures <- err
					return
				}
			}
		}()
	}
	time.Sleep(span / 5)
	if err := wait(commands); err != nil {
		return Turns{}, err
	}
	start, before := time.Now(), snapshot(counts)
	result := Turns{Acquisitions: -acquisitions.Load()}
	time.Sleep(span)
	after := snapshot(counts)
	result.Seconds = time.Since(start).Seconds()
	result.Acquisitions += acquisitions.Load()
	stop.Store(true)
	cancel()
	done.Wait()
	result.Overlaps = overlaps.Load()
	for number := range counts {
		count := after[number] - before[number]
		result.Turns += count
		result.Most = max(result.Most, count)
		if number == 0 || count < result.Fewest {
			result.Fewest = count
		}
	}
	select {
	case err := <-failures:
		return Turns{}, err
	default:
		return result, nil
	}
}

func snapshot(counts []atomic.Int64) []int64 {
	values := make([]int64, len(counts))
	for number := range counts {
		values[number] = counts[number].Load()
	}
	return values
}
